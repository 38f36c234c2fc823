"""beartype, except that an int is a float as it is for every type checker."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
