"""Operations that find stored text and begin sequences with it: a file for each."""
