"""Redis for all other packages: connections, the meaning of replies, names of keys.

connection.py     one pipelined connection; TLS, and where the primary is
link.py           the connections that many share
replies.py        which replies are errors, which of those pass, and what INFO tells
keyspace.py       the name of every key and channel
check.py          why Redis cannot be used, or would lose what it accepts
configuration.py  what is wrong with its configuration, by what INFO tells
"""
