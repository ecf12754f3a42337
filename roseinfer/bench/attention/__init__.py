"""The benchmark of one layer's attention: of decode steps and of prompts."""
