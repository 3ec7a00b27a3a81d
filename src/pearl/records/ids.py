"""Identifiers, each a type of its own so that one cannot stand in for another."""

from typing import NewType

TrajectoryId = NewType("TrajectoryId", str)
GroupId = NewType("GroupId", str)
RequestId = NewType("RequestId", str)
TaskId = NewType("TaskId", str)
HandleId = NewType("HandleId", str)
LeaseId = NewType("LeaseId", str)
NodeId = NewType("NodeId", str)
GpuId = NewType("GpuId", str)

WorkerId = NewType("WorkerId", int)
"""A stable slot of the fleet, >= 0; a slot is never renumbered and keeps its GPUs for life."""

WeightVersion = NewType("WeightVersion", int)
"""Rises by one per training step; 0 is the model the run began with."""
