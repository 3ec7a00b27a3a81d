"""Errors that a user or a caller can act on.

Each message says what, where, what was got, what is allowed and, where there is one, the next step. Expected outcomes of
the control plane (a refusal, an infeasible shape) are values, never exceptions.
"""


class PearlError(Exception):
    """Base of every error that pearl raises on purpose."""


class UserError(PearlError):
    """Something the user wrote or asked for cannot be done; the command line ends with exit status 2."""


class ConfigError(UserError):
    """A recipe or an override is wrong: the message names the file, the key, what was got and what is allowed."""


class ShapeError(UserError):
    """A fleet shape such as `2P6D@tp2` cannot be read or cannot exist."""


class RunFolderError(UserError):
    """A run folder cannot be created, read or resumed."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or belongs to another model."""


class ModelError(UserError):
    """A model folder is missing, damaged, or of an unsupported architecture."""


class ProfileError(UserError):
    """A platform profile is not one: the message names the field, what was got and what is allowed."""


class StateError(PearlError):
    """An event contradicts the GPU-worker-role state; the state is unchanged."""


class EngineError(PearlError):
    """An engine refused or failed one request; the engine itself goes on."""


class WorkerLost(PearlError):
    """The process of a rollout worker died without notice."""


class WeightsError(PearlError):
    """Weights cannot be published, fetched or loaded."""


class TrainingError(PearlError):
    """A training step cannot be done with this batch, or came out not finite; the trainer's state is unchanged."""


class EnvironmentFault(PearlError):
    """An environment failed; the subclasses are the typed end statuses of a trajectory."""


class EnvironmentRaised(EnvironmentFault):
    """The environment's own code raised."""


class EnvironmentHung(EnvironmentFault):
    """The environment did not answer within its time-out."""


class EnvironmentLost(EnvironmentFault):
    """The process that ran the environment died."""


class EnvironmentNonsense(EnvironmentFault):
    """The environment answered with something that is not a valid observation or reply."""


class RunFailed(PearlError):
    """A run cannot go on: a bound on restarts, failures or waits was passed."""
