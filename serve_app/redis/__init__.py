"""Redis for all other packages: connections, the client, the meaning of replies, names of keys.

connection.py   one pipelined connection, for the hot paths
link.py         the connections that many share
client.py       redis-py, for everything else; where the primary is
replies.py      which replies are errors, and which of those pass
keyspace.py     the name of every key and channel
memory.py       how much it can take
check.py        why Redis cannot be used, or would lose what it accepts; trial.py: what is tried
"""
