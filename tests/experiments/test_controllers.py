"""The flag --controller: every form makes what it says, and anything else is one message."""
from absl.testing import flagsaver
import pytest

from experiments.harness import controllers
from specjax.serving import control


@pytest.fixture(autouse=True)
def parsed_flags():
  controllers.flags.FLAGS(["test"], known_only=True)


@pytest.mark.parametrize("given, made", [
    ("goodput", control.Goodput()), ("fixed", control.Fixed()), ("fixed:0", control.Fixed(0)), ("gate", control.Gate()),
    ("gate:0.5", control.Gate(0.5)), ("budget:12", control.Budget(12)),
    ("table:4=7,16=3", control.Table({4: 7, 16: 3}))])
def test_every_form(given, made):
  with flagsaver.flagsaver(controller=given):
    make = controllers.maker()
    assert make() == made and make() is not make()


@pytest.mark.parametrize("given", ["", "fast", "fixed:", "fixed:-1", "gate:2", "gate:1.2.3", "table:4", "table:0=7",
                                   "budget"])
def test_others_are_refused_by_name(given):
  with flagsaver.flagsaver(controller=given):
    with pytest.raises(ValueError, match=f"--controller={given}"):
      controllers.maker()
