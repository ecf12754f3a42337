"""Functions that a model may call: how they are asked for, and how calls are read from texts."""
