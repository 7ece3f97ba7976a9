"""Redis for all other packages: connections, the client, the meaning of replies, names of keys.

connection.py, shared.py   one pipelined connection, for the hot paths and for what many share
client.py, sentinel.py     redis-py, for everything else; where the primary is
groups.py                  consumer groups, which a Redis that came back empty does not know
replies.py                 which replies are errors, and which of those pass
keyspace.py                every key and channel: name, type, writers, lifetime
memory.py                  how much it can take
check.py                   why Redis cannot be used, or would lose what it accepts
"""
