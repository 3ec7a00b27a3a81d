"""The elastic scheduler: carries out what the decision core decides, in the real and the simulated world alike."""
