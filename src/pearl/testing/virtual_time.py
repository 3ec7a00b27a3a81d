"""The clock that tests run on: `pearl.virtual_time`, under the name that it has for users of `pearl.testing`."""

from pearl.virtual_time import RealWorldRefused, Stall, Stalled, VirtualLoop, run_virtual

__all__ = ["RealWorldRefused", "Stall", "Stalled", "VirtualLoop", "run_virtual"]
