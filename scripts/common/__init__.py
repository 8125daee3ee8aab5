"""Small parts that several entry scripts share: schemes on the command line, README sections, the commit."""
