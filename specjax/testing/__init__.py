"""Stand-ins for tests and experiments: a target without weights, drafters that know it. No library code imports it."""
from specjax.testing.drafters import always_wrong
from specjax.testing.drafters import SelfDrafter
from specjax.testing.dummy import DummyTarget
from specjax.testing.noisy import NoisySelf
from specjax.testing import tiny

__all__ = ["DummyTarget", "NoisySelf", "SelfDrafter", "always_wrong", "tiny"]
