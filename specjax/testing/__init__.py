"""Stand-ins for tests and experiments: a target without weights, drafters that know it. No library code imports it."""
from specjax.testing.drafters import always_wrong
from specjax.testing.drafters import SelfDrafter
from specjax.testing.dummy import DummyTarget

__all__ = ["DummyTarget", "SelfDrafter", "always_wrong"]
