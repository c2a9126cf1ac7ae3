"""How bytes leave the process: over torch.distributed or between threads, counted, slowed down, in checked frames."""
