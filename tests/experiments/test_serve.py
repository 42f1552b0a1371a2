"""The server as a program: it says when it is ready, answers, and ends by a signal; bad flags are one message."""
import re
import signal
import subprocess

import pytest

import programs

openai = pytest.importorskip("openai")
FLAGS = [f"--target={programs.TINY}", "--draft_tokens=3", "--port=0", "--nowarm_up"]
CASES = {
    "all": (["--method=all"], "a server has one method"), "unused": (["--temperature=1"], "makes no use of it"),
    "long": (["--max_model_len=999"], "--max_model_len=999"), "rows": (["--max_num_seqs=0"], "--max_num_seqs=0"),
    "host": (["--host=192.0.2.1"], "cannot listen at 192.0.2.1 port 0"),
    "package": ([], "pip install 'specjax[serve]'"),
    "encoder": (["--target=tests/fixtures/encoder_decoder/t5", "--method=plain"], "is for decoders"),
}


def test_it_serves_until_it_is_told_to_end(tmp_path_factory):
  env = programs.environment(tmp_path_factory)
  command = programs.command("serve", *FLAGS, "--max_num_seqs=2", "--api_key=k", "--served_model_name=tiny")
  with programs.interruptible(), subprocess.Popen(command, cwd=programs.ROOT, env=env, text=True,
                                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
    try:
      ready = process.stdout.readline()
      url = re.fullmatch(r"ready: tiny at (http://127\.0\.0\.1:\d+/v1)\n", ready)[1]
      with openai.OpenAI(base_url=url, api_key="k", max_retries=0, timeout=120) as client:
        ask = lambda **kwargs: client.completions.create(model="tiny", prompt="ab ab", max_tokens=8, **kwargs)
        assert ask(temperature=0).choices[0].text == ask(temperature=0).choices[0].text != ""
        assert len(list(ask(stream=True))) > 1
      with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
          stranger.models.list()
      process.send_signal(signal.SIGTERM)
      assert process.wait(60) == 0
      assert process.stderr.read() == ""
    finally:
      process.kill()


def test_bad_flags_are_one_message(tmp_path_factory):
  setups = {"package": "sys.modules['aiohttp'] = None"}
  cases = [("serve", [*FLAGS, *more], setups.get(name, "")) for name, (more, _) in CASES.items()]
  ended = programs.run_all(cases, env=programs.environment(tmp_path_factory))
  for (name, (_, said)), end in zip(CASES.items(), ended, strict=True):
    assert end.code == 2 and said in end.message and "Traceback" not in end.err, (name, end)
