"""Operations on whole sequences, which write no token: a file for each."""
