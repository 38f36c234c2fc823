"""The experiments of the paper, which `winnow reproduce` runs."""
