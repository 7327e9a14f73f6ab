-- Leases: claims that span transactions, fences, checkpoints, locks.
\set VERBOSITY sqlstate
\set SHOW_CONTEXT never
\pset null '(null)'
CREATE ROLE regress_lease;
SELECT idempotency.grant_usage('regress_lease');
SET ROLE regress_lease;

-- the first lease: attempt 1, a fence from the clock, a deadline from now
SELECT status, response, meta, attempt, checkpoint, checkpoint_data,
       fence BETWEEN extract(epoch FROM clock_timestamp() - timestamptz '2000-01-01 00:00Z' - interval '1 min') * 1000000
                 AND extract(epoch FROM clock_timestamp() - timestamptz '2000-01-01 00:00Z') * 1000000 AS fence_is_clock,
       deadline > clock_timestamp() + '9 min' AND deadline <= clock_timestamp() + '10 min' AS deadline_ok
FROM idempotency.lease('bank', 'k1', '10 min', '{"amount": 1}');
SELECT fence AS f1 FROM idempotency.lookup('bank', 'k1') \gset
SELECT status, fence = :f1 AS fence, deadline IS NOT NULL AS deadline, attempt,
       expires_at - deadline AS ttl
FROM idempotency.lookup('bank', 'k1');

-- it is live: every other claim is told so at once, and mismatch goes first; a
-- lease is told its deadline, which is when to come again, and its attempt, not its fence
SELECT l.status, l.response, l.fence, l.deadline = held.deadline AS deadline, l.attempt, l.checkpoint
FROM idempotency.lease('bank', 'k1', '10 min') l, idempotency.lookup('bank', 'k1') held;
SELECT * FROM idempotency.claim('bank', 'k1', '{"amount": 1.0}');
SELECT * FROM idempotency.claim('bank', 'k1', '{"amount": 2}');
SELECT status FROM idempotency.lease('bank', 'k1', '10 min', '{"amount": 2}');
SELECT * FROM idempotency.run('bank', 'k1', 'nosuchfunction');
SELECT idempotency.once('bank', 'k1');

-- a fence is needed, and the right one; nothing is changed by a wrong one
SELECT idempotency.complete('bank', 'k1', 'x') IS NOT NULL AS complete;
SELECT idempotency.fail('bank', 'k1', 'x') IS NOT NULL AS fail;
SELECT idempotency.release('bank', 'k1');
SELECT idempotency.extend('bank', 'k1', NULL, '1 min');
SELECT idempotency.checkpoint('bank', 'k1', NULL, 'c') IS NOT NULL AS checkpoint;
SELECT idempotency.complete('bank', 'k1', 'x', fence => :f1 - 1) IS NOT NULL AS complete;
SELECT idempotency.complete('bank', 'k1', 'x', fence => :f1 + 1) IS NOT NULL AS complete;
SELECT idempotency.fail('bank', 'k1', 'x', fence => 0) IS NOT NULL AS fail;
SELECT idempotency.release('bank', 'k1', :f1 - 1);
SELECT idempotency.extend('bank', 'k1', :f1 - 1, '1 min');
SELECT idempotency.checkpoint('bank', 'k1', :f1 - 1, 'c') IS NOT NULL AS checkpoint;
SELECT status, fence = :f1 AS fence FROM idempotency.lookup('bank', 'k1');

-- extend counts from now; completed with the ttl that the lease was given
SELECT idempotency.extend('bank', 'k1', :f1, '1 hour') > clock_timestamp() + '59 min' AS extended;
SELECT idempotency.extend('bank', 'k1', :f1, '1 min') < clock_timestamp() + '2 min' AS shortened;
SELECT idempotency.checkpoint('bank', 'k1', :f1, 'charged', '{"charge": 7}') IS NOT NULL AS checkpoint;
SELECT status, attempt, checkpoint, checkpoint_data FROM idempotency.lookup('bank', 'k1');
SELECT idempotency.complete('bank', 'k1', 'done', '{"http": 201}', :f1) IS NOT NULL AS complete;
SELECT status, response, meta, fence = :f1 AS fence, deadline, attempt,
       expires_at BETWEEN clock_timestamp() + '23:59' AND clock_timestamp() + '24:00' AS ttl
FROM idempotency.lookup('bank', 'k1');
SELECT * FROM idempotency.claim('bank', 'k1', '{"amount": 1}');
SELECT status, response, meta, fence, deadline, attempt, checkpoint FROM idempotency.lease('bank', 'k1', '1 min');

-- once more with the fence that completed it: the reply may have been lost
SELECT idempotency.complete('bank', 'k1', 'another', NULL, :f1) IS NOT NULL AS complete;
SELECT response FROM idempotency.lookup('bank', 'k1');
SELECT idempotency.fail('bank', 'k1', 'another', NULL, :f1) IS NOT NULL AS fail;
SELECT idempotency.complete('bank', 'k1', 'another') IS NOT NULL AS complete;
SELECT idempotency.complete('bank', 'k1', 'another', NULL, :f1 - 1) IS NOT NULL AS complete;
SELECT idempotency.extend('bank', 'k1', :f1, '1 min');
SELECT idempotency.checkpoint('bank', 'k1', :f1, 'c') IS NOT NULL AS checkpoint;
SELECT idempotency.release('bank', 'k1', :f1);

-- '0' expires at once, and is not "no lease"; a taker sees attempt and checkpoint
SELECT fence AS f2 FROM idempotency.lease('bank', 'k2', '0', '{"a": 1}', ttl => '1 h') \gset
SELECT status, deadline <= clock_timestamp() AS lapsed, expires_at - deadline AS ttl FROM idempotency.lookup('bank', 'k2');
SELECT idempotency.checkpoint('bank', 'k2', :f2, 'sent') IS NOT NULL AS checkpoint;
SELECT idempotency.extend('bank', 'k2', :f2, '1 min') AS too_late;
SELECT status FROM idempotency.lease('bank', 'k2', '1 min', '{"a": 2}') AS another_request;
SELECT status, fence > :f2 AS higher, attempt, checkpoint FROM idempotency.lease('bank', 'k2', '0');
SELECT fence AS f3 FROM idempotency.lookup('bank', 'k2') \gset
SELECT idempotency.complete('bank', 'k2', 'zombie', NULL, :f2) IS NOT NULL AS complete;
SELECT idempotency.extend('bank', 'k2', :f2, '1 min');
-- the newest fence is good after the deadline, as long as nobody took over
SELECT idempotency.fail('bank', 'k2', 'declined', NULL, :f3) IS NOT NULL AS fail;
SELECT status, response, attempt FROM idempotency.lookup('bank', 'k2');

-- a claim in transaction mode takes over as well; rolled back, the old fence is the newest again
SELECT fence AS f4 FROM idempotency.lease('bank', 'k4', '0') \gset
BEGIN;
SELECT status FROM idempotency.claim('bank', 'k4');
SAVEPOINT s;
SELECT idempotency.complete('bank', 'k4', 'zombie', NULL, :f4) IS NOT NULL AS complete;
ROLLBACK TO s;
SELECT idempotency.release('bank', 'k4', :f4);
ROLLBACK TO s;
SELECT idempotency.complete('bank', 'k4', 'mine') IS NOT NULL AS complete;
SELECT status, fence > :f4 AS higher, attempt FROM idempotency.lookup('bank', 'k4');
ROLLBACK;
SELECT idempotency.checkpoint('bank', 'k4', :f4, 'still mine', '[1]') IS NOT NULL AS checkpoint;
BEGIN;
SELECT status FROM idempotency.claim('bank', 'k4');
-- shown to the taker, so that it can verify before it repeats
SELECT * FROM idempotency.lookup('bank', 'k4');
SELECT idempotency.complete('bank', 'k4', 'mine') IS NOT NULL AS complete;
COMMIT;
SELECT status, response, fence > :f4 AS higher, attempt, checkpoint FROM idempotency.lookup('bank', 'k4');
SELECT idempotency.complete('bank', 'k4', 'zombie', NULL, :f4) IS NOT NULL AS complete;
-- once() takes over a lapsed lease
SELECT status FROM idempotency.lease('bank', 'k5', '0');
SELECT idempotency.once('bank', 'k5'), idempotency.once('bank', 'k5');

-- held, for every mode that is asked for
BEGIN;
SELECT status FROM idempotency.lease('bank', 'k6', '1 min');
SELECT status FROM idempotency.claim('bank', 'k6');
SELECT status FROM idempotency.lease('bank', 'k6', '1 min');
SELECT idempotency.once('bank', 'k6');
SELECT status FROM idempotency.claim('bank', 'k7');
SELECT status FROM idempotency.lease('bank', 'k7', '1 min');
SELECT idempotency.complete('bank', 'k7') IS NOT NULL AS complete;
COMMIT;
SELECT status FROM idempotency.lookup('bank', 'k6');

-- savepoints take a lease, its completion and its extension back
BEGIN;
SAVEPOINT s;
SELECT status FROM idempotency.lease('bank', 'k8', '1 min');
ROLLBACK TO s;
SELECT status FROM idempotency.lookup('bank', 'k8');
SELECT fence AS f8 FROM idempotency.lease('bank', 'k8', '1 min') \gset
SAVEPOINT s;
SELECT idempotency.complete('bank', 'k8', 'x', NULL, :f8) IS NOT NULL AS complete;
ROLLBACK TO s;
SELECT status FROM idempotency.lookup('bank', 'k8');
COMMIT;
SELECT idempotency.complete('bank', 'k8', 'x', NULL, :f8) IS NOT NULL AS complete;

-- release keeps the row, and the fence goes on growing
SELECT fence AS f9 FROM idempotency.lease('bank', 'k9', '1 min') \gset
SELECT idempotency.checkpoint('bank', 'k9', :f9, 'half') IS NOT NULL AS checkpoint;
SELECT idempotency.release('bank', 'k9', :f9), idempotency.release('bank', 'k9', :f9);
SELECT * FROM idempotency.lookup('bank', 'k9');
SELECT idempotency.complete('bank', 'k9', 'x', NULL, :f9) IS NOT NULL AS complete;
SELECT idempotency.release('bank', 'k9', :f9 - 1);
SELECT idempotency.release('bank', 'k9');
SELECT status, fence > :f9 AS higher, attempt, checkpoint FROM idempotency.lease('bank', 'k9', '1 min');

-- a fence on an answer that was stored without one never was right, 0 included
SELECT idempotency.once('bank', 'plain');
SELECT idempotency.complete('bank', 'plain', 'x', NULL, 0) IS NOT NULL AS complete;
SELECT idempotency.release('bank', 'plain', 0);

-- a fence is higher than the last one, also when the clock was set back
RESET ROLE;
UPDATE idempotency.keys SET fence = 9000000000000000000, deadline = clock_timestamp() WHERE key = 'k9';
SET ROLE regress_lease;
SELECT fence, deadline - clock_timestamp() <= '24 h' AS bounded FROM idempotency.lease('bank', 'k9', '48 h');

-- an unfinished lease is forgotten ttl after its deadline
SELECT fence AS f10 FROM idempotency.lease('bank', 'k10', '0', ttl => '1 us') \gset
SELECT pg_sleep(0.001);
SELECT * FROM idempotency.lookup('bank', 'k10');
SELECT idempotency.complete('bank', 'k10', 'x', NULL, :f10) IS NOT NULL AS complete;
SELECT status, fence > :f10 AS higher, attempt FROM idempotency.lease('bank', 'k10', '1 min');

-- complete and fail say until when the answer is replayed, also when they are asked again
SELECT fence AS f20 FROM idempotency.lease('until', 'k', '1 h', ttl => '2 h') \gset
SELECT idempotency.checkpoint('until', 'k', :f20, 'c') = (idempotency.lookup('until', 'k')).deadline AS deadline;
SELECT idempotency.complete('until', 'k', 'x', fence => :f20) AS until \gset
SELECT :'until' = expires_at AS stored, :'until' - clock_timestamp() BETWEEN '1 h 59 min' AND '2 h' AS from_completion,
       :'until' = idempotency.complete('until', 'k', 'x', fence => :f20) AS again,
       :'until' = idempotency.complete('until', 'k', 'x', fence => :f20, ttl => '10 h') AS not_changed
FROM idempotency.lookup('until', 'k');
-- a ttl of their own
SELECT fence AS f21 FROM idempotency.lease('until', 'l', '1 h', ttl => '2 h') \gset
SELECT idempotency.fail('until', 'l', 'x', fence => :f21, ttl => '1 min') - clock_timestamp() BETWEEN '59 s' AND '1 min' AS a_minute,
       (idempotency.lookup('until', 'l')).expires_at - clock_timestamp() < '1 min' AS stored;
SELECT idempotency.complete('until', 'm', ttl => '0');
SELECT idempotency.complete('until', 'm', ttl => '10000 years');
-- extend() after one's own complete() is too late; with another fence it is refused
SELECT idempotency.extend('until', 'k', :f20, '1 h'), idempotency.extend('until', 'l', :f21, '1 h') AS after_fail;
SELECT idempotency.extend('until', 'k', :f20 - 1, '1 h');
SELECT fence AS f22 FROM idempotency.lease('until', 'r', '1 h') \gset
SELECT idempotency.release('until', 'r', :f22), idempotency.extend('until', 'r', :f22, '1 h');
SELECT idempotency.extend('until', 'never', :f22, '1 h');

-- many keys in one statement, one of them twice
SELECT i, l.status, l.attempt FROM (VALUES (1, 'm1'), (2, 'm2'), (3, 'm1')) v(i, k), LATERAL idempotency.lease('many', k, '1 h') l ORDER BY i;

-- locks
SELECT idempotency.acquire_lock('job', '1 min') AS fl \gset
SELECT :fl > 0 AS fence, idempotency.acquire_lock('job', '1 min') AS again;
SELECT idempotency.renew_lock('job', :fl, '1 h') > clock_timestamp() + '59 min' AS renewed;
SELECT idempotency.renew_lock('job', :fl - 1, '1 h');
SELECT idempotency.release_lock('job', :fl - 1);
SELECT idempotency.release_lock('job', :fl), idempotency.release_lock('job', :fl), idempotency.release_lock('nosuch', 1);
SELECT idempotency.renew_lock('job', :fl, '1 h');
SELECT idempotency.acquire_lock('job', '0') > :fl AS higher;
SELECT idempotency.acquire_lock('job', '1 h') > :fl AS higher_again;

-- bad input
SELECT idempotency.lease('s', 'k', NULL);
SELECT idempotency.lease('s', 'k', '-1 s');
SELECT idempotency.lease('s', 'k', '300000 years');
SELECT idempotency.lease('s', 'k', '1 s', ttl => '0');
SELECT idempotency.lease('s', 'k', '1 s', wait => '-1 s');
SELECT idempotency.lease(NULL, 'k', '1 s');
SELECT idempotency.lease('s', '', '1 s');
SELECT idempotency.lease('idempotency.lock', 'job', '1 s');
SELECT idempotency.extend('s', 'k', 1, NULL);
SELECT idempotency.extend('s', 'k', 1, '-1 s');
SELECT idempotency.extend('s', 'k', 1, '1 s');
SELECT idempotency.checkpoint('s', 'k', 1, NULL) IS NOT NULL AS checkpoint;
SELECT idempotency.checkpoint('s', 'k', 1, 'c') IS NOT NULL AS checkpoint;
SELECT idempotency.acquire_lock(NULL, '1 s');
SELECT idempotency.acquire_lock('', '1 s');
SELECT idempotency.acquire_lock(repeat('x', 513), '1 s');
SELECT idempotency.acquire_lock('job', NULL);
SELECT idempotency.renew_lock('job', NULL, '1 s');
SELECT idempotency.release_lock(NULL, 1);
SELECT * FROM idempotency.lookup('s', 'k');
BEGIN READ ONLY;
SELECT status FROM idempotency.lease('bank', 'k1', '1 min');
SELECT idempotency.lease('s', 'k', '1 s');
ROLLBACK;
BEGIN READ ONLY;
SELECT idempotency.checkpoint('bank', 'k9', 1, 'c') IS NOT NULL AS checkpoint;
ROLLBACK;

-- an operator sees leases with scope and key, and where they stand
RESET ROLE;
SELECT mode, scope, key, attempt, pid, deadline > clock_timestamp() AS live,
       since = timestamptz '2000-01-01 00:00Z' + fence * interval '1 us' AS since_grant
FROM idempotency.in_flight WHERE scope IN ('idempotency.lock', 'many') ORDER BY scope, key;
SELECT mode, scope, key, attempt FROM idempotency.holder('many', 'm2');

SELECT count(*) FROM pg_locks WHERE locktype = 'advisory';
DELETE FROM idempotency.keys;
SELECT idempotency.revoke_usage('regress_lease');
DROP ROLE regress_lease;
