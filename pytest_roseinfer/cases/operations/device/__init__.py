"""Operations that say when a simulated device works: a file for each."""
