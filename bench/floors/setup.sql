-- The table of the floors: what our key table is, without us.
CREATE TABLE floor_key (
  scope text COLLATE "C" NOT NULL,
  key text COLLATE "C" NOT NULL,
  status "char" NOT NULL,
  response text,
  PRIMARY KEY (key, scope));
INSERT INTO floor_key
SELECT 'bench', (1000000000000000000 + i * (8000000000000000000 / :rows))::text, 'c', repeat('x', 180)
FROM generate_series(1, :rows) i
ORDER BY hashint8(i);
