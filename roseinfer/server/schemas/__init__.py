"""The bodies of OpenAI's API: requests, responses and their validation."""
