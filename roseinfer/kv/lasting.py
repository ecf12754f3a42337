"""Tensors that outlive the call that makes them."""

from __future__ import annotations

from functools import partial

import torch

lasting = partial(torch.inference_mode, mode=False)
"""In this context tensors are made that may be written to at any time.

One made in inference mode could be written to in inference mode alone, and a buffer is made or
grown wherever its first use happens to be.
"""
