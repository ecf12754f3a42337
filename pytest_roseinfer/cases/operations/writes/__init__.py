"""Operations that write tokens, or make room for some: a file for each."""
