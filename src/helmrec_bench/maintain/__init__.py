"""Tools that write files of this repository other than measurements."""
