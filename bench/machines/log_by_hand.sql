\set id random(1, :rows)
INSERT INTO log_by_hand (table_name, row_id, machine, from_state, to_state, changed_at, changed_by) VALUES ('public.logged_order', to_jsonb(:id::bigint), 'bench', 'CREATED', 'PAID', clock_timestamp(), current_user);
