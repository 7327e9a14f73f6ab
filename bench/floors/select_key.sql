-- Floor R: the answer of a stored key, by a plain prepared SELECT.
\set k 1000000000000000000 + random(1, :rows) * (8000000000000000000 / :rows)
SELECT status, response FROM floor_key WHERE key = :k AND scope = 'bench';
