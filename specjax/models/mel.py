"""What Whisper hears: the log-mel spectrogram of 30 seconds of sound.

Sources: arXiv 2212.04356, section 2.2, and `audio` of openai/whisper; the filters are those that librosa's
`filters.mel` gives by default (Slaney's scale and norm). On the host, in NumPy.
"""
import functools

import numpy as np

RATE = 16000     # samples a second
SECONDS = 30
_WINDOW = 400    # samples of a frame, and of its Fourier transform
_HOP = 160       # samples from frame to frame
_TOP = 8000.0    # Hz; where the last filter ends
_LINEAR = 200.0 / 3.0            # Hz a mel below the break of Slaney's scale
_BREAK = 1000.0                  # Hz
_STEP = np.log(6.4) / 27.0       # logarithm of the frequency a mel above it


def log_mel(waveform, rate: int, mels: int = 80) -> np.ndarray:
  """The features of one sound.

  Args:
    waveform: f[N], samples of one channel within -1 and 1, at most 30 seconds; silence fills the rest.
    rate: samples a second; 16000.
    mels: M, filters: 80, and 128 for large-v3.

  Returns:
    f32[M, 3000], a frame a hundredth of a second.

  Raises:
    ValueError: another rate, more than 30 seconds, or no such samples.
  """
  if rate != RATE:
    raise ValueError(f"rate={rate!r}: sound is heard at {RATE} samples a second; resample it first")
  samples = np.asarray(waveform)
  if samples.ndim != 1 or samples.dtype.kind != "f" or not samples.size:
    raise ValueError(f"waveform is {samples.dtype}{list(samples.shape)}: one channel of floats, f[N], is heard; mix "
                     "channels and divide whole numbers by their greatest value first")
  if samples.size > RATE * SECONDS:
    raise ValueError(f"waveform has {samples.size / RATE:.2f} seconds: at most {SECONDS} are heard; cut it")
  if not np.isfinite(samples).all():
    raise ValueError("waveform holds NaN or infinity; every sample must be finite")
  padded = np.zeros(RATE * SECONDS)
  padded[:samples.size] = samples
  padded = np.pad(padded, _WINDOW // 2, mode="reflect")
  frames = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[::_HOP][:-1]
  window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_WINDOW) / _WINDOW)
  power = np.abs(np.fft.rfft(frames * window, axis=1)) ** 2
  found = np.log10(np.maximum(filters(mels) @ power.T, 1e-10))
  found = np.maximum(found, found.max() - 8.0)
  return ((found + 4.0) / 4.0).astype(np.float32)


@functools.lru_cache
def filters(mels: int) -> np.ndarray:
  """Triangles over the 201 frequencies of a frame, each of the area that Slaney's norm gives it: f64[M, 201]."""
  scale = np.linspace(0.0, _BREAK / _LINEAR + np.log(_TOP / _BREAK) / _STEP, mels + 2)
  above = scale > _BREAK / _LINEAR
  corners = np.where(above, _BREAK * np.exp(_STEP * (scale - _BREAK / _LINEAR)), _LINEAR * scale)
  low, middle, high = (corners[i:i + mels, None] for i in range(3))
  frequency = np.linspace(0.0, RATE / 2, _WINDOW // 2 + 1)
  triangle = np.minimum((frequency - low) / (middle - low), (high - frequency) / (high - middle))
  return np.maximum(triangle, 0.0) * 2.0 / (high - low)
