"""Sound is decoded to one channel at the processor's rate; what is no sound, too long or a trap is refused."""

from __future__ import annotations

import numpy as np
import pytest
from support.media_files import (
    SOUND_FORMATS,
    VIDEO_FORMATS,
    image_array,
    image_file,
    sine_wave,
    sound_file,
    video_file,
    wav_file,
)

from parley.model.media_input.audio import decode_audio
from parley.model.media_input.unusable import UnusableMedia

RATE = 16_000


def refusal(data: bytes, max_seconds: float = 600) -> UnusableMedia:
    with pytest.raises(UnusableMedia) as caught:
        decode_audio(data, RATE, max_seconds)
    return caught.value


def strongest_frequency(samples: np.ndarray) -> float:
    return float(np.abs(np.fft.rfft(samples)).argmax() * RATE / len(samples))


@pytest.mark.parametrize("name", SOUND_FORMATS)
def test_reads_each_format(name: str):
    samples = decode_audio(sound_file(*SOUND_FORMATS[name], np.stack([sine_wave(1, 48_000)] * 2), 48_000), RATE, 600)
    assert samples.dtype == np.float32
    assert len(samples) / RATE == pytest.approx(1, abs=0.1)
    assert strongest_frequency(samples) == pytest.approx(440, abs=2)
    assert np.abs(samples[2000:-4000]).max() == pytest.approx(0.5, abs=0.05)


def test_keeps_samples_that_have_the_rate_already():
    tone = sine_wave(0.5, RATE)
    assert np.abs(decode_audio(wav_file(tone[None], RATE), RATE, 600) - tone).max() < 1e-4


def test_takes_the_mean_of_the_channels():
    left, right = sine_wave(0.5, RATE), np.zeros(RATE // 2, np.float32)
    samples = decode_audio(wav_file(np.stack([left, right]), RATE), RATE, 600)
    assert np.abs(samples - left / 2).max() < 1e-4


@pytest.mark.parametrize("count", [6, 8, 9, 12, 64])
def test_takes_the_mean_of_many_channels(count: int):
    channels = np.stack([sine_wave(0.5, RATE) * number / count for number in range(count)])
    samples = decode_audio(wav_file(channels, RATE), RATE, 600)
    assert np.abs(samples - channels.mean(axis=0)).max() < 1e-4


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000])
def test_resamples_to_the_rate_of_the_processor(rate: int):
    samples = decode_audio(wav_file(sine_wave(2, rate)[None], rate), RATE, 600)
    assert len(samples) == pytest.approx(2 * RATE, abs=64)
    assert strongest_frequency(samples) == pytest.approx(440, abs=1)


def test_stops_at_the_limit_of_seconds():
    silence = sound_file("flac", "flac", np.zeros((1, 601 * 8_000), np.float32), 8_000)
    assert len(silence) < 1 << 18
    assert refusal(silence).predicate == "is longer than 600 seconds, which is the limit"
    assert refusal(wav_file(sine_wave(1, RATE)[None], RATE), 0.9).reason == "too_long"
    slow = wav_file(np.zeros((1, 20_000), np.float32), 1)  # 20,000 seconds in 40 kB
    assert refusal(slow).reason == "too_long"


SDP = b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=x\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\nm=audio 5004 RTP/AVP 0\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        SDP,
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1/a.ts\n",
        image_file(image_array()),
        video_file(**VIDEO_FORMATS["avi"]),
    ],
    ids=["empty", "sdp", "concat", "playlist", "image", "avi"],
)
def test_refuses_other_formats(data: bytes):
    assert refusal(data).reason == "unknown_format"


@pytest.mark.parametrize(
    "start", [b"ID3\x04\0\0\0\0\0\0", b"RIFF\x24\0\0\0WAVEfmt ", b"OggS", b"fLaC", b"\x1aE\xdf\xa3"]
)
@pytest.mark.parametrize("rest", [SDP, b"ffconcat version 1.0\nfile /etc/passwd\n"], ids=["sdp", "concat"])
def test_opens_no_text_that_pretends_to_be_sound(start: bytes, rest: bytes):
    assert refusal(start + rest).reason == "undecodable"


def test_refuses_videos_without_sound():
    assert refusal(video_file()).predicate == "has no audio"


def test_refuses_files_without_samples():
    assert refusal(wav_file(np.zeros((1, 0), np.float32), RATE)).reason == "undecodable"
