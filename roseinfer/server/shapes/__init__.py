"""The bodies of OpenAI's API: what may be asked, and how answers look."""
