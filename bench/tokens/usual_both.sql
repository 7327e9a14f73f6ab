\set k random(1000000000000000000, 9000000000000000000)
INSERT INTO usual_token (token, subject, purpose, expires_at) VALUES (:k, :k, 'form', clock_timestamp() + '5 min');
DELETE FROM usual_token WHERE token = :k AND subject = :k AND purpose = 'form' AND expires_at > clock_timestamp() RETURNING token;
