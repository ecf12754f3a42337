"""Operations that take a sequence out of the cache and bring it back: a file for each."""
