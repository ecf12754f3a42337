"""An engine as a server uses it: in the server's process, or in one of its own."""
