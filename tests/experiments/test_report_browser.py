"""The page in a browser: nothing complains, tables sort by click and key, the explorer steps and switches methods.

Skipped where Debian's chromium and chromedriver (packages `chromium` and `chromium-driver`), or selenium, are absent.
"""

import json
import os
import shutil

import pytest

from experiments import report
from experiments.report import figures, latency
import test_report

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: it is in the extra `test`")
from selenium.webdriver.common.by import By  # pylint: disable=wrong-import-position
from selenium.webdriver.common.keys import Keys  # pylint: disable=wrong-import-position
from selenium.webdriver.support.ui import Select  # pylint: disable=wrong-import-position

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium or chromedriver is not installed: apt "
                                "install chromium chromium-driver")


@pytest.fixture(scope="module")
def browser():
  options = webdriver.ChromeOptions()
  options.binary_location = CHROMIUM
  for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu",
                   "--window-size=1200,900"):
    options.add_argument(argument)
  options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
  found = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER, log_output=os.devnull))
  yield found
  found.quit()


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory):
  """A page with a trace, opened; plots are left out: they are pictures."""
  folder = test_report.write_run(tmp_path_factory.mktemp("browser"))
  steps = test_report.make_steps("code-0") + test_report.make_steps("chat-0", category="chat")
  (folder / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps), encoding="utf-8")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(figures, "draw_all", lambda *args: [])
    patch.setattr(latency, "draw_all", lambda *args: [])
    path = report.write_report(folder)
  browser.get(path.as_uri())
  return browser


@pytest.fixture
def fresh(page):
  page.refresh()
  page.get_log("browser")
  return page


def by_id(browser, name):
  return browser.find_element(By.ID, name)


def text(browser):
  return by_id(browser, "trace-text").get_property("textContent")


def nodes(browser):
  """(class, label) of every node of the tree."""
  return [(node.get_attribute("class").removeprefix("node "), node.get_attribute("aria-label"))
          for node in browser.find_elements(By.CSS_SELECTOR, "#trace-tree g.node")]


def column(browser, place):
  """The first cells of the rows of one section of the first results table, by the text of one column."""
  return browser.execute_script(
      "const t = [...document.querySelectorAll('main table')].find(t => t.querySelector('tr.section'));"
      "return [...t.tBodies[0].rows].map((r, i) => r.cells[i ? arguments[0] : 0].textContent.trim());", place)


def title(browser, name):
  return next(button for button in browser.find_elements(By.CSS_SELECTOR, "button.sort")
              if button.get_property("textContent") == name)


def test_nothing_complains_and_nothing_is_loaded(fresh):
  fresh.refresh()
  assert not fresh.get_log("browser")
  loaded = fresh.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
  assert not [name for name in loaded if not name.startswith("data:")]


def test_a_click_and_a_key_sort_a_table(fresh):
  """Numbers the greatest first, then the least; the section's title stays on top and dashes at the end."""
  button = title(fresh, "tokens/s")
  head = button.find_element(By.XPATH, "..")
  place = fresh.execute_script("return arguments[0].cellIndex", head)
  before = column(fresh, place)
  numbers = sorted(map(float, before[1:]))
  assert head.get_attribute("aria-sort") == "none" and list(map(float, before[1:])) != numbers[::-1]
  fresh.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
  button.click()
  assert head.get_attribute("aria-sort") == "descending" and list(map(float, column(fresh, place)[1:])) == numbers[::-1]
  button.send_keys(Keys.ENTER)
  assert head.get_attribute("aria-sort") == "ascending" and list(map(float, column(fresh, place)[1:])) == numbers
  assert column(fresh, 0)[0] == "all categories"
  acceptance = title(fresh, "acceptance")
  acceptance.send_keys(Keys.SPACE)
  assert head.get_attribute("aria-sort") == "none"
  assert column(fresh, 0)[-1] == "plain"  # plain decoding accepts nothing: a dash


def test_the_explorer_steps_by_button_key_and_slider(fresh):
  assert by_id(fresh, "trace-place").text == "step 1 of 2"
  assert not by_id(fresh, "trace-previous").is_enabled()
  assert text(fresh).endswith("▸  f(x</script>")
  by_id(fresh, "trace-next").click()
  assert by_id(fresh, "trace-place").text == "step 2 of 2" and text(fresh).endswith(" f(x</script>)")
  assert "the request ends: length" in by_id(fresh, "trace-summary").text
  by_id(fresh, "explorer").find_element(By.CSS_SELECTOR, ".tree").send_keys(Keys.ARROW_LEFT)
  assert by_id(fresh, "trace-place").text == "step 1 of 2"
  by_id(fresh, "trace-step").send_keys(Keys.ARROW_RIGHT)
  assert by_id(fresh, "trace-place").text == "step 2 of 2"


def test_the_tree_says_what_became_of_every_node(fresh):
  found = nodes(fresh)
  assert sorted(kind for kind, _ in found) == ["accepted", "accepted", "new", "rejected", "root", "unreached"]
  labels = dict(found)
  assert "drawn from q 0.500" in labels["rejected"] and "u = 0.75" in labels["rejected"]
  assert "p 0.250" in labels["new"]
  node = fresh.find_element(By.CSS_SELECTOR, "#trace-tree g.rejected")
  fresh.execute_script("arguments[0].focus()", node)
  assert by_id(fresh, "trace-node").text == labels["rejected"]
  assert "rejected by draw with u = 0.75" in by_id(fresh, "trace-summary").text
  origins = fresh.execute_script("return [...document.querySelectorAll('#trace-text span.now')].map(s => s.className)")
  assert origins == ["d now", "d now", "now"]


def test_another_method_is_shown_at_the_same_place_of_the_text(fresh):
  radios = fresh.find_elements(By.NAME, "trace-method")
  assert len(radios) == 2 and [radio.is_selected() for radio in radios] == [False, True]  # one that drafts comes first
  by_id(fresh, "trace-next").click()
  radios[0].click()
  assert by_id(fresh, "trace-place").text == "step 4 of 4" and text(fresh).endswith(" f(x</script>)")
  assert "nothing was drafted" in by_id(fresh, "trace-summary").text
  radios[1].click()
  assert by_id(fresh, "trace-place").text == "step 2 of 2"
  Select(by_id(fresh, "trace-request")).select_by_index(1)
  assert by_id(fresh, "trace-place").text == "step 1 of 2" and "Request chat-0." in text(fresh)


def test_a_phone_scrolls_tables_and_not_the_page(fresh):
  size = fresh.get_window_size()
  try:
    fresh.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                          {"width": 375, "height": 740, "deviceScaleFactor": 1, "mobile": True})
    width = fresh.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert width[0] <= 375 and width[1] == 375
  finally:
    fresh.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    fresh.set_window_size(size["width"], size["height"])
