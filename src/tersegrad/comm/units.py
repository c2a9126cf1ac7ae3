"""Rates, times and byte counts as people write them."""

import re

_RATES = {f"{k}bit{s}": v / 8 for k, v in (("", 1.0), ("k", 1e3), ("m", 1e6), ("g", 1e9)) for s in ("", "/s", "ps")}
_RATES |= {"kb/s": 1e3, "mb/s": 1e6, "gb/s": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z/]+)\s*")


def parse_rate(text: str) -> float:
    """Bytes per second.

    >>> parse_rate("100Mbit"), parse_rate("20 MB/s")
    (12500000.0, 20000000.0)
    """
    rate = _parse(text, _RATES, "a rate", "100Mbit, 1Gbit or 20MB/s")
    if rate == 0:
        raise ValueError(f"{text!r}: a link of zero bandwidth carries nothing. Leave it out for an unlimited link.")
    return rate


def parse_time(text: str) -> float:
    """Seconds.

    >>> parse_time("20ms")
    0.02
    """
    return _parse(text, _TIMES, "a time", "1ms, 0.5s or 80us")


def _parse(text: str, scales: dict[str, float], what: str, like: str) -> float:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].lower() not in scales:
        raise ValueError(f"{text!r} is not {what}. Write it like {like}.")
    return float(match[1]) * scales[match[2].lower()]


def show_bytes(nbytes: float) -> str:
    """Bytes for people.

    >>> show_bytes(1234567)
    '1.23 MB'
    """
    for unit in ("B", "kB", "MB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"
