\set k random(1000000000000000000, 9000000000000000000)
INSERT INTO usual_token (token, subject, purpose, expires_at) VALUES (:k, :k, 'form', clock_timestamp() + '5 min');
