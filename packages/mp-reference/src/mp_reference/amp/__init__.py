"""The machinery that makes low precision safe, as pure functions: loss scale, clipping, optimizers, the step."""
