"""The one error of this package: a checkpoint that cannot be used as it is."""


class CheckpointError(ValueError):
  """A checkpoint that is damaged, foreign or asks for something that is not supported.

  Its message is for the person who named the checkpoint: which file, which tensor or key, what is allowed, what to do.
  """
