"""The figures of gates are kept from run to run, drawn, and looked at for changes."""
