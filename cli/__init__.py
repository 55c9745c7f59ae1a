"""The command line of kvkit: one verb a file, and the .npz files that verbs read and write."""
