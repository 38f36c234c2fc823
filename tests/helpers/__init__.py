"""Problems, oracles and processes that tests share."""
