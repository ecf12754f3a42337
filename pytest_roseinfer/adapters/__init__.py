"""The classes that downstream users write, and the mistakes found in them."""
