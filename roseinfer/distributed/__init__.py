"""The processes that each compute a part of one model, and how they act as one."""
