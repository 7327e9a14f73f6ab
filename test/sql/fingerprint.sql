-- What is kept of a request: a digest that follows jsonb's =, or of a text.
\set SHOW_CONTEXT never
CREATE TEMP TABLE saved AS TABLE idempotency.secrets;

-- of every pair of requests: mismatch, if and only if jsonb says that they differ
CREATE TEMP TABLE doc (id integer GENERATED ALWAYS AS IDENTITY, doc jsonb);
INSERT INTO doc (doc) VALUES
  ('null'), ('true'), ('false'), ('0'), ('1'), ('1.0'), ('1.00'), ('10'), ('1e1'), ('100e-1'), ('-1'), ('-1.0'), ('0.1'), ('1e-1'), ('0.10'), ('0e215962017'), ('0e291242476'),
  ('-0'), ('12345678901234567890'), ('12345678901234567890.0'), ('12345678901234567891'), ('1e20'), ('100000000000000000000'), ('1e-20'), ('0.00000000000000000001'),
  ('""'), ('"1"'), ('"1.0"'), ('"true"'), ('"null"'), ('"a"'), ('"A"'), ('"\u0061"'), ('"a "'), ('"é"'), ('"é"'), ('"[]"'),
  ('[]'), ('{}'), ('[[]]'), ('[{}]'), ('[null]'), ('[1]'), ('[1.0]'), ('["1"]'), ('[1, 2]'), ('[2, 1]'), ('[12]'), ('["a", "b"]'), ('["ab"]'), ('["a,b"]'), ('[["a"], "b"]'), ('[["a", "b"]]'), ('["a", ["b"]]'),
  ('{"a": 1}'), ('{"a": 1.0}'), ('{"a": "1"}'), ('{"b": 1}'), ('{"a": null}'), ('{"a": {}}'), ('{"a": []}'), ('{"": ""}'), ('{"a": ""}'), ('{"": "a"}'),
  ('{"a": 1, "b": 2}'), ('{"b": 2.0, "a": 1e0}'), ('{"b": 2, "a": 3, "a": 1}'), ('{"a": 2, "b": 1}'), ('{"a": {"b": 2}}'), ('{"a": [{"b": 1, "cc": 2}]}'), ('{"a": [{"cc": 2.00, "b": 1.0}]}'),
  ('["a", 1]'), ('[{"a": 1}]'), ('[{"a": 1.0}]'), ('["a", "b", 1, 2]'), (to_jsonb(repeat('x', 100000))), (to_jsonb(repeat('x', 100001))), (to_jsonb('NaN'::numeric)), ('"NaN"'),
  (to_jsonb(1.5000::numeric(20, 10))), ('1.5'), (to_jsonb(1.5::float8)), (jsonb_build_object('a', 1.50)), ('{"a": 1.5}');
-- numbers with more zeros at the end than PostgreSQL's short form counts, and such as have none
INSERT INTO doc (doc) SELECT replace(d, '#', '.' || repeat('0', n))::jsonb
FROM unnest(ARRAY['1#', '[1#, 2]', '{"a": 1#}', '{"a": {"b": [null, 10#, "x"]}}', '0#', '-5#']) d, unnest(ARRAY[1, 62, 63, 64, 70, 300]) n;
INSERT INTO doc (doc) SELECT n::jsonb FROM unnest(ARRAY['1e-70', '10e-71', '1e-300', '1e300', '1' || repeat('0', 300) || '.0', '1e-64', '0.1e-63', '1e260', '1.5e260', '[1e-70, 1.0]', '[10e-71, 1.00]', '[1e-70, 1.1]']) n;
-- and deep, and many, and made at random of few things, so that equal ones are among them
INSERT INTO doc (doc) SELECT (repeat('[', n) || 1 || repeat(']', n))::jsonb FROM unnest(ARRAY[500, 500, 501]) n;
INSERT INTO doc (doc) SELECT jsonb_agg(i) FROM unnest(ARRAY[999, 1000, 1000]) n, generate_series(1, n) i GROUP BY n;
INSERT INTO doc (doc)
SELECT jsonb_object_agg(k, v ORDER BY random())
FROM generate_series(1, 60) n,
     LATERAL (SELECT n, chr(97 + (random() * 2)::integer) AS k, (ARRAY['1', '1.0', '"1"', '[1.0]', '[1]', '{"x": 1}', '{"x": 1.00}'])[1 + (n + random() * 6)::integer % 7]::jsonb AS v FROM generate_series(1, 1 + n % 3)) m
GROUP BY n;

-- a small request of numbers that are long when they are written out takes little
SELECT (idempotency.run('print', 'long numbers', 'jsonb_typeof', ('[' || repeat('1e131071, ', 300) || '1]')::jsonb)).status,
       (SELECT sum(total_bytes) < 32 * 1024 * 1024 FROM pg_backend_memory_contexts) AS little;
SELECT (idempotency.claim('print', 'long numbers', ('[' || repeat('10e131070, ', 300) || '1.0]')::jsonb)).status AS same,
       (idempotency.claim('print', 'long numbers', ('[' || repeat('1e131071, ', 299) || '1e131070, 1]')::jsonb)).status AS other;

SELECT count(idempotency.once('unprinted', id::text)) AS without FROM doc;
BEGIN;
SELECT count(*) FILTER (WHERE (idempotency.claim('print', id::text, doc)).status = 'claimed') = count(*) AS claimed, count(*) > 100 AS many FROM doc;
-- of a claim that is open
SELECT count(*) AS pairs_wrong FROM doc a, doc b
WHERE (idempotency.claim('print', a.id::text, b.doc)).status IS DISTINCT FROM CASE WHEN a.doc = b.doc THEN 'held' ELSE 'mismatch' END;
SELECT count(idempotency.complete('print', id::text)) = count(*) AS completed FROM doc;
COMMIT;
-- of one that is stored
SELECT count(*) FILTER (WHERE a.doc = b.doc AND a.id <> b.id) > 50 AS equal, count(*) FILTER (WHERE a.doc <> b.doc) > 5000 AS different FROM doc a, doc b;
SELECT count(*) AS pairs_wrong FROM doc a, doc b
WHERE (idempotency.claim('print', a.id::text, b.doc)).status IS DISTINCT FROM CASE WHEN a.doc = b.doc THEN 'completed' ELSE 'mismatch' END;
-- what gave nothing is not compared
SELECT count(*) AS wrong FROM doc WHERE (idempotency.claim('print', id::text)).status <> 'completed' OR (idempotency.claim('unprinted', id::text, doc)).status <> 'completed';
-- 128 bits, in 22 bytes of the row, and no two the same
SELECT min(octet_length(fingerprint) - 5) * 8 AS bits, max(pg_column_size(fingerprint)) AS bytes, count(DISTINCT fingerprint) = (SELECT count(DISTINCT doc) FROM doc) AS distinct
FROM idempotency.keys WHERE scope = 'print' AND key <> 'long numbers';

-- a text of the caller's, in place of the request: byte by byte
SELECT status, idempotency.complete('text', 'k') IS NOT NULL AS complete FROM idempotency.claim('text', 'k', fingerprint => '0e215962017');
SELECT text, (idempotency.claim('text', 'k', fingerprint => text)).status
FROM unnest(ARRAY['0e215962017', '0e291242476', '0E215962017', '0e215962017 ', '', NULL]) text;
SELECT (idempotency.run('text', 'k', 'f', '{"not": "compared"}', fingerprint => '0e215962017')).status AS same, (idempotency.run('text', 'k', 'f', '{}', fingerprint => 'other')).status AS other,
       (idempotency.lease('text', 'k', '1 s', fingerprint => 'other')).status AS lease;
-- a parameter of no declared type, as drivers send it, is a text there; a function gets the request all the same
PREPARE untyped AS SELECT status FROM idempotency.claim('text', 'k', fingerprint => $1);
EXECUTE untyped('0e215962017');
EXECUTE untyped('ab12');
SELECT * FROM idempotency.run('text', 'run', 'jsonb_typeof', '{"a": 1}', fingerprint => 'f');
SELECT (idempotency.run('text', 'run', 'jsonb_typeof', '{"another": 1}', fingerprint => 'f')).status;
-- a text and a request are of different kinds: not compared
SELECT (idempotency.claim('text', 'k', '{"a": 1}')).status AS request, (idempotency.claim('print', '1', fingerprint => 'a')).status AS text,
       (idempotency.claim('text', 'k', '"0e215962017"')).status AS the_same_as_json;
-- a lease has it too, and the next attempt
SELECT status FROM idempotency.lease('text', 'lease', '0', fingerprint => 'a');
SELECT status FROM idempotency.lease('text', 'lease', '0');
SELECT status FROM idempotency.claim('text', 'lease', fingerprint => 'b');
SELECT status, attempt FROM idempotency.lease('text', 'lease', '0', fingerprint => 'a');

-- with a newer secret the old one still tells; with that lost, nothing does
INSERT INTO idempotency.secrets DEFAULT VALUES;
SELECT status FROM idempotency.run('text', 'new secret', 'jsonb_typeof', '1');
SELECT (idempotency.claim('text', 'k', fingerprint => '0e215962017')).status AS same, (idempotency.claim('text', 'k', fingerprint => 'x')).status AS other,
       (idempotency.claim('text', 'new secret', '1.0')).status AS same_new, (idempotency.claim('text', 'new secret', '2')).status AS other_new;
DELETE FROM idempotency.secrets WHERE id IN (SELECT id FROM saved);
SELECT (idempotency.claim('text', 'k', fingerprint => '0e215962017')).status AS same, (idempotency.claim('text', 'k', fingerprint => 'x')).status AS not_compared,
       (idempotency.claim('text', 'new secret', '2')).status AS other_new;
-- without any, nothing is stored to compare
TRUNCATE idempotency.secrets;
SELECT status, idempotency.complete('text', 'no secret') IS NOT NULL AS complete FROM idempotency.claim('text', 'no secret', '1');
SELECT fingerprint IS NULL AS none FROM idempotency.keys WHERE key = 'no secret';
INSERT INTO idempotency.secrets TABLE saved;
SELECT (idempotency.claim('text', 'k', fingerprint => 'x')).status AS other, (idempotency.claim('text', 'no secret', '2')).status AS none;
-- what somebody has put in its place
UPDATE idempotency.keys SET fingerprint = '\x00' WHERE scope = 'text' AND key = 'k';
SELECT (idempotency.claim('text', 'k', fingerprint => 'x')).status;
DELETE FROM idempotency.keys;
