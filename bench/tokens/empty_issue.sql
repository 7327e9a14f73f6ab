\set k 1000000000000000000 + random(1, :rows) * 2654435761 % 8000000000 * 1000000000
SELECT empty_issue(:k, 'form');
