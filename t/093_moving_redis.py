#!/usr/bin/python3
"""A client of 093_moving_redis.pl: pays as old code, the bridge or new code does it,
for one key after another, until it is told to end (SIGTERM).  The bridge dies now
and then, in the middle of a request, as if by kill -9.

  093_moving_redis.py old|bridge|new KEYS REDIS_SOCKET
"""
import json
import os
import random
import signal
import sys

import psycopg
import redis

LOCK = 'lock'
BRIDGE = 'lock of the bridge'    # old code takes it for a lock
way, keys, socket = sys.argv[1], int(sys.argv[2]), sys.argv[3]
store = redis.Redis(unix_socket_path=socket, decode_responses=True)
database = psycopg.connect(autocommit=True)
ended = False


def pay(key):
    number, = database.execute('INSERT INTO payment (order_no, amount) VALUES (%s, 1) RETURNING id', [key]).fetchone()
    return json.dumps({'payment': number})


def old(key):
    found = store.set(f'idem:{key}', LOCK, nx=True, get=True, ex=600)
    if found is None:
        answer = pay(key)
        store.set(f'idem:{key}', answer, ex=86400)
        return answer
    return None if found.startswith(LOCK) else found


def bridge(key):
    answer = None
    with database.transaction():
        may_die()
        status, answer = database.execute("SELECT status, response FROM idempotency.claim('pay', %s, wait => '5 s')", [key]).fetchone()
        if status != 'claimed':
            return answer
        found = store.set(f'idem:{key}', BRIDGE, nx=True, get=True, ex=604800)
        may_die()
        if found in (None, BRIDGE):
            answer = pay(key)
        elif found.startswith(LOCK):
            raise psycopg.Rollback()
        else:
            answer = found
        database.execute("SELECT idempotency.complete('pay', %s, %s::text)", [key, answer])
        may_die()
    if answer is not None:
        may_die()
        store.set(f'idem:{key}', answer, ex=86400)
    return answer


def new(key):
    with database.transaction():
        status, answer = database.execute("SELECT status, response FROM idempotency.claim('pay', %s, wait => '5 s')", [key]).fetchone()
        if status == 'claimed':
            answer = pay(key)
            database.execute("SELECT idempotency.complete('pay', %s, %s::text)", [key, answer])
    return answer


def may_die():
    if random.random() < 0.002:
        os.kill(os.getpid(), signal.SIGKILL)


def end(*_):
    global ended
    ended = True


signal.signal(signal.SIGTERM, end)
request = {'old': old, 'bridge': bridge, 'new': new}[way]
while not ended:
    k = random.randint(1, keys)
    response = request(f'k{k}')
    if response is not None:
        database.execute('INSERT INTO answer VALUES (%s, %s, %s)', [k, way, response])
