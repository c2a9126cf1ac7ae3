"""Random numbers as a hash of a key and a counter: the same on every machine and device, in any order."""

__all__ = ["MIX_1", "MIX_2", "MIX_3", "UNIFORM_BITS", "split_key"]

MIX_1 = 0x85EBCA6B  # odd multipliers that mix well: those of MurmurHash3's last step (A. Appleby),
MIX_2 = 0xC2B2AE35
MIX_3 = 0x9E3779B1  # and 2^32 / golden ratio
UNIFORM_BITS = 24  # bits of a uniform number: as many as a float32 holds


def split_key(key: int) -> tuple[int, int]:
    """Two halves of 32 bits, in which every bit depends on every bit of the key (as in SplitMix64, S. Vigna)."""
    if not 0 <= key < 1 << 64:
        raise ValueError(f"a key has 64 bits, got {key}. Make one with mix_seed.")
    h = key + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    h = (h ^ (h >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    h ^= h >> 31
    return h & 0xFFFFFFFF, h >> 32
