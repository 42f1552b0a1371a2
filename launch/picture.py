"""Takes a picture of a page that an experiment wrote, as a browser shows it: Debian's chromium and chromium-driver.

  python launch/picture.py runs/default/report.html explorer.png --of=explorer --click=trace-next --times=12
"""
import os
import pathlib
import shutil
import sys

from absl import app
from absl import flags

_OF = flags.DEFINE_string("of", None, "Id of the part of the page that the picture begins with; its top by default.")
_CLICK = flags.DEFINE_string("click", None, "Id of a button that is pressed before.")
_TIMES = flags.DEFINE_integer("times", 1, "How often.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 1200, "Of the window, pixels.", lower_bound=320)
_HEIGHT = flags.DEFINE_integer("height", 800, "Of the window, pixels.", lower_bound=200)


def main(args):
  binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
  if len(args) != 3 or not pathlib.Path(args[1]).is_file():
    sys.exit("error: give the page and the picture: python launch/picture.py runs/default/report.html page.png")
  if not (binary and driver):
    sys.exit("error: chromium or chromedriver is not there: apt install chromium chromium-driver")
  from selenium import webdriver  # of the extra `test`
  from selenium.webdriver.common.by import By
  options = webdriver.ChromeOptions()
  options.binary_location = binary
  for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars",
                   f"--window-size={_WIDTH.value},{_HEIGHT.value}"):
    options.add_argument(argument)
  browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver, log_output=os.devnull))
  try:
    browser.get(pathlib.Path(args[1]).resolve().as_uri())
    for _ in range(_TIMES.value if _CLICK.value else 0):
      browser.execute_script("arguments[0].click()", browser.find_element(By.ID, _CLICK.value))
    if _OF.value:
      browser.execute_script("arguments[0].scrollIntoView()", browser.find_element(By.ID, _OF.value))
    browser.save_screenshot(args[2])
  finally:
    browser.quit()
  print(args[2])


if __name__ == "__main__":
  app.run(main)
