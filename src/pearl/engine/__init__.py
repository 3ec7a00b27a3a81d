"""Inference engines behind `pearl.ports.Engine`, one package each; imports neither `train` nor `env`."""
