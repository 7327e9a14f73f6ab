\set k random(1000000000000000000, 9000000000000000000)
INSERT INTO floor_mark (expires_at, marked_at, id, revoked) VALUES (clock_timestamp() + '5 min', clock_timestamp(), (:k || '0000000000000')::uuid, false);
