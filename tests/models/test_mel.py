"""The log-mel features of Whisper, beside those of Transformers."""
import pathlib

import numpy as np
import pytest

from specjax.models import mel

GOLDEN = dict(np.load(pathlib.Path(__file__).parents[1] / "fixtures" / "golden_encoder_decoder.npz"))


@pytest.mark.parametrize("mels", [80, 128])
def test_features_are_those_of_transformers(mels):
  heard = mel.log_mel(GOLDEN["mel_wave"], 16000, mels)
  assert heard.shape == (mels, 3000) and heard.dtype == np.float32
  assert np.abs(heard[:, :300:10] - GOLDEN[f"mel_{mels}"]).max() < 1e-4
  assert np.ptp(heard[:, :250]) > 1 and np.ptp(heard[:, 260:]) == 0  # silence, 8 below the loudest


def test_half_a_minute_is_heard_to_its_end():
  heard = mel.log_mel(np.random.default_rng(0).standard_normal(480000), 16000)
  assert heard.shape == (80, 3000) and np.isfinite(heard).all() and heard[:, -1].max() > 0


@pytest.mark.parametrize("waveform, rate, named", [
    (np.zeros(100), 44100, "rate=44100: sound is heard at 16000 samples a second; resample"),
    (np.zeros(480160), 16000, "waveform has 30.01 seconds: at most 30"),
    (np.zeros((2, 100)), 16000, r"waveform is float64\[2, 100\]: one channel"),
    (np.zeros(100, np.int16), 16000, r"waveform is int16\[100\]: one channel of floats"),
    (np.zeros(0), 16000, r"waveform is float64\[0\]"), (np.full(9, np.nan), 16000, "NaN")])
def test_sounds_that_are_refused(waveform, rate, named):
  with pytest.raises(ValueError, match=named):
    mel.log_mel(waveform, rate)
