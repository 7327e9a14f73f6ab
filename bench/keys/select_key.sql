-- Floor R: the answer of a stored key by a plain prepared SELECT.
\set k 1000000000000000000 + random(1, :rows) * 2654435761 % 8000000000 * 1000000000
SELECT status, response FROM floor_key WHERE key = :k AND scope = 'bench';
