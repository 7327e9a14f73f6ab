\set k random(1000000000000000000, 9000000000000000000)
\set fence 1
SELECT status, coalesce(fence, 1) AS fence FROM empty_lease('bench', :k, '1 min') \gset
SELECT empty_complete('bench', :k, repeat('x', 180), fence => :fence);
