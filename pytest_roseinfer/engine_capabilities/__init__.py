"""What an engine may offer: a module for each capability, with all that tests it."""
