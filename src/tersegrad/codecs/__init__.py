"""What selectors and quantisers share: codecs of indices and values."""
