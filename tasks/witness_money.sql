-- The second ledger, second half: hour parts and estimates to addresses and layers, and the differences from the first
-- ledger. Goes on from witness.sql, with its macros and tables, in the same session.
-- Source: infra/rules/ledger.md 4 and 5.
--
-- In, beside what witness.sql leaves: the ledger under test in addresses_in, layers_in, spans_in.
-- Out: w_addresses, w_layers, d_addresses, d_spans, d_layers, w_totals.

-- === What is to be addressed: hour parts of charges, and estimates (section 4.13) ===================================

-- Price of the day: the latest that is dated at or before it, else undated, else the earliest later one. Machines are
-- priced by the hour, at spot where all their rows are, else as the latest closed bill has it, else at list; volumes by the GiB and calendar month (UTC), at list.
CREATE TEMP TABLE price AS
    WITH offers AS (
        SELECT x_Cloud AS cloud, SkuId AS sku, RegionId AS region, PricingCategory AS pricing, x_AsOf, BillingCurrency,
               ListUnitPrice::HUGEINT AS price, day, unit_ns(PricingUnit, false) = 3600000000000 AS is_hourly
        FROM prices_in CROSS JOIN settings_in
        WHERE unit_ns(PricingUnit, false) = 3600000000000 OR PricingUnit = 'GiB-Mo'
    )
    SELECT cloud, sku, region, pricing, coalesce(is_hourly, false) AS is_hourly, price, BillingCurrency AS currency
    FROM offers
    QUALIFY row_number() OVER (
        PARTITION BY cloud, sku, region, pricing, is_hourly
        ORDER BY CASE WHEN NOT regexp_matches(x_AsOf, '^[0-9]{4}') THEN 1 WHEN x_AsOf <= day::VARCHAR THEN 0 ELSE 2 END,
                 CASE WHEN x_AsOf <= day::VARCHAR THEN x_AsOf END DESC, x_AsOf, BillingCurrency) = 1;

-- List amounts of machine-hours and volume-hours without a row in the bill; without a price there is no estimate.
CREATE TEMP TABLE estimated AS
    WITH listed AS (
        SELECT m.cloud, machine AS what, hour, vid, NULL AS category, m.itype, m.itype AS family,
               coalesce(s.pricing, 'Standard') AS pricing, m.account, coalesce(s.currency, k.currency, l.currency) AS currency,
               half_even(coalesce(s.price, k.price::HUGEINT, l.price) * span, 3600000000000 * coarse) AS listed
        FROM (SELECT m.* EXCLUDE (region), coalesce(m.region, r.region) AS region
              FROM machine_hour m LEFT JOIN regions_in r ON r.cloud = m.cloud) m CROSS JOIN settings_in
             LEFT JOIN price l ON l.is_hourly AND l.pricing = 'Standard' AND l.cloud = m.cloud AND l.sku = m.itype
                              AND l.region = m.region
             LEFT JOIN price s ON s.is_hourly AND s.pricing = 'Dynamic' AND is_spot AND s.cloud = m.cloud AND s.sku = m.itype
                              AND s.region = m.region
             LEFT JOIN contracted_in k ON NOT is_spot AND k.cloud = m.cloud AND k.account = coalesce(m.account[1], '')
                                      AND k.sku = m.itype AND k.region = m.region
        WHERE estimated AND coalesce(s.price, k.price::HUGEINT, l.price) IS NOT NULL
        UNION ALL
        SELECT v.cloud, volume, hour, coalesce(j.vid, vids[1]), CASE WHEN vids IS NULL THEN 'idle' END, NULL, family, pricing,
               account, currency,
               half_even(price * bytes, 1073741824::HUGEINT * 24 * date_part('day', last_day(day))::HUGEINT * coarse)
        FROM (SELECT v.* EXCLUDE (region), coalesce(v.region, r.region) AS region
              FROM volume v LEFT JOIN regions_in r ON r.cloud = v.cloud) v CROSS JOIN settings_in LEFT JOIN joint j USING (vids)
             JOIN price p ON NOT is_hourly AND pricing = 'Standard' AND p.cloud = v.cloud AND p.sku = family
                         AND p.region = v.region
    )
    SELECT l.* EXCLUDE (account), l.account[1] AS account, l.account[2] AS sub_account,
           half_even(listed * coalesce(alpha, 1000000000000)::HUGEINT, 1000000000000) AS estimate
    FROM listed l LEFT JOIN alphas_in a ON a.cloud = l.cloud AND a.account = coalesce(l.account[1], '') AND a.family = l.family;

CREATE TEMP TABLE claim AS
    WITH claims AS (
        SELECT x_ChargeKey AS charge, x_Occurrence AS occurrence, p.hour, c.x_Cloud AS cloud,
            coalesce(m.vid, j.vid, g.vids[1]) AS vid,
            CASE WHEN on_dependant AND g.id IS NULL THEN 'idle' ELSE early END AS category,
            billed, effective, promotional, list, NULL::HUGEINT AS estimate, x_InstanceType AS itype, PricingCategory AS pricing,
            BillingAccountId AS account, SubAccountId AS sub_account, BillingPeriodStart AS period, InvoiceId AS invoice,
            BillingCurrency AS currency, 'billed' AS state
        FROM part p JOIN charge c USING (id)
             LEFT JOIN machine_hour m ON on_machine AND m.cloud = x_Cloud AND m.machine = x_MachineId AND m.hour = p.hour
             LEFT JOIN hanging g ON g.id = p.id AND g.hour = p.hour LEFT JOIN joint j ON j.vids = g.vids
        UNION ALL
        SELECT 'estimate:' || cloud || '/' || what, 0, hour, cloud, vid, category, NULL, NULL, NULL, NULL, estimate, itype,
               pricing, account, sub_account, NULL, NULL, currency, 'provisional'
        FROM estimated
    )
    SELECT row_number() OVER () AS pid, * FROM claims;

-- === Rule 5: first rounding (section 4.10), each ledger on its own ==================================================

CREATE TEMP VIEW address_weights AS
    SELECT pid * 5 + ledger AS grp, pos, units, weight
    FROM (SELECT pid, vid, 0 AS ledger, billed AS units FROM claim UNION ALL SELECT pid, vid, 1, effective FROM claim
          UNION ALL SELECT pid, vid, 2, list FROM claim UNION ALL SELECT pid, vid, 3, estimate FROM claim
          UNION ALL SELECT pid, vid, 4, promotional FROM claim)
         JOIN vector USING (vid)
    WHERE units <> 0 AND weight > 0;

-- The instance type of an address is that of the machine-hour, whatever the charge says: a machine may change its type within
-- the hour, and a disk's work belongs to its machine's layers.
-- Where a ledger has no amount (null), its addresses have none.
CREATE TEMP TABLE w_addresses AS
    WITH shared AS (
        SELECT grp // 5 AS pid, pos, sum(part) FILTER (grp % 5 = 0) AS billed, sum(part) FILTER (grp % 5 = 1) AS effective,
               sum(part) FILTER (grp % 5 = 2) AS list, sum(part) FILTER (grp % 5 = 3) AS estimate,
               sum(part) FILTER (grp % 5 = 4) AS promotional
        FROM largest_remainder('address_weights') GROUP BY ALL
    ), spread AS (
        SELECT c.* REPLACE (m.itype AS itype, v.category AS category,
                   CASE WHEN c.billed IS NOT NULL THEN coalesce(s.billed, 0) END AS billed,
                   CASE WHEN c.effective IS NOT NULL THEN coalesce(s.effective, 0) END AS effective,
                   CASE WHEN c.promotional IS NOT NULL THEN coalesce(s.promotional, 0) END AS promotional,
                   CASE WHEN c.list IS NOT NULL THEN coalesce(s.list, 0) END AS list,
                   CASE WHEN c.estimate IS NOT NULL THEN coalesce(s.estimate, 0) END AS estimate),
               v.machine, device, job, attempt, rank
        FROM claim c JOIN vector v USING (vid) JOIN machine_hour m ON m.vid = v.home
             LEFT JOIN shared s ON s.pid = c.pid AND s.pos = v.pos
        UNION ALL
        SELECT *, NULL, NULL, NULL, NULL, NULL FROM claim WHERE vid IS NULL
    )
    SELECT charge AS x_ChargeKey, occurrence AS x_Occurrence, hour AS x_HourUtc, machine AS x_MachineId,
           device AS x_DeviceId, job AS x_JobId, attempt AS x_Attempt, rank AS x_Rank, category AS x_Category,
           billed AS BilledCost, effective AS EffectiveCost, list AS ListCost, estimate AS x_EstimatedCost,
           promotional AS x_PromotionalCost, cloud, itype, pricing, account, sub_account, period, invoice, currency, state
    FROM spread;

-- === Rule 9: second rounding (section 4.11) =========================================================================

-- Layers of a job-hour on one instance type (of_type), and on all types together.
CREATE TEMP TABLE strand AS
    WITH work AS (SELECT * FROM layer_in WHERE category = 'work')
    SELECT *, row_number() OVER (PARTITION BY hour, job, attempt, of_type, itype
                                 ORDER BY layer, pass, op, phase, batch_size, dtype) AS pos,
           sum(ns) OVER (PARTITION BY hour, job, attempt, of_type, itype) AS total
    FROM (SELECT hour_utc AS hour, job_id AS job, attempt, true AS of_type, instance_type AS itype, layer, pass, op, phase,
                 batch_size, dtype, sum(ns)::BIGINT AS ns FROM work GROUP BY ALL
          UNION ALL
          SELECT hour_utc, job_id, attempt, false, NULL, layer, pass, op, phase, batch_size, dtype, sum(ns)::BIGINT
          FROM work GROUP BY ALL);

CREATE TEMP TABLE pool AS
    SELECT row_number() OVER () AS pid, p.*, t.job IS NOT NULL AS of_type,
           CASE WHEN t.job IS NOT NULL THEN p.itype END AS strands
    FROM (SELECT x_HourUtc AS hour, cloud, x_JobId AS job, x_Attempt AS attempt, itype, pricing, account, sub_account,
                 period, invoice, currency, state, sum(BilledCost) AS billed, sum(EffectiveCost) AS effective,
                 sum(x_EstimatedCost) AS estimate, sum(x_PromotionalCost) AS promotional
          FROM w_addresses WHERE x_Category = 'work' AND x_JobId IS NOT NULL GROUP BY ALL) p
         LEFT JOIN (SELECT DISTINCT hour, job, attempt, itype FROM strand WHERE of_type) t
         ON t.hour = p.hour AND t.job = p.job AND t.attempt = p.attempt AND t.itype IS NOT DISTINCT FROM p.itype;

CREATE TEMP VIEW pool_strand AS
    SELECT p.*, s.pos, s.ns, layer, pass, op, phase, batch_size, dtype
    FROM pool p JOIN strand s ON s.hour = p.hour AND s.job = p.job AND s.attempt = p.attempt AND s.of_type = p.of_type
                             AND s.itype IS NOT DISTINCT FROM p.strands
    WHERE total > 0;  -- layers without any time cannot share out money

CREATE TEMP VIEW layer_weights AS
    SELECT pid * 4 + ledger AS grp, pos, units, ns AS weight
    FROM (SELECT pid, pos, ns, 0 AS ledger, billed AS units FROM pool_strand
          UNION ALL SELECT pid, pos, ns, 1, effective FROM pool_strand
          UNION ALL SELECT pid, pos, ns, 2, estimate FROM pool_strand
          UNION ALL SELECT pid, pos, ns, 3, promotional FROM pool_strand)
    WHERE units IS NOT NULL;

CREATE TEMP TABLE w_layers AS
    WITH shared AS (
        SELECT grp // 4 AS pid, pos, sum(part) FILTER (grp % 4 = 0) AS billed, sum(part) FILTER (grp % 4 = 1) AS effective,
               sum(part) FILTER (grp % 4 = 2) AS estimate, sum(part) FILTER (grp % 4 = 3) AS promotional
        FROM largest_remainder('layer_weights') GROUP BY ALL
    )
    SELECT hour AS x_HourUtc, cloud AS x_Cloud, job AS x_JobId, attempt AS x_Attempt, itype AS x_InstanceType,
           pricing AS PricingCategory, account AS BillingAccountId, sub_account AS SubAccountId,
           period AS BillingPeriodStart, invoice AS InvoiceId, currency AS BillingCurrency, state AS x_State,
           layer AS x_Layer, pass AS x_Pass, op AS x_Op, phase AS x_Phase, batch_size AS x_BatchSize, dtype AS x_Dtype,
           s.billed AS BilledCost, s.effective AS EffectiveCost, s.estimate AS x_EstimatedCost,
           s.promotional AS x_PromotionalCost
    FROM pool_strand p JOIN shared s USING (pid, pos);

-- === The comparison: one row on either side of each key, equal to the digit, or a difference ========================

CREATE TEMP TABLE d_addresses AS
    SELECT * EXCLUDE (side, b, e, l, x, p), count(*) FILTER (side) AS ours, count(*) FILTER (NOT side) AS theirs,
           sum(b) FILTER (side) AS BilledCost, sum(b) FILTER (NOT side) AS BilledCost_ledger,
           sum(e) FILTER (side) AS EffectiveCost, sum(e) FILTER (NOT side) AS EffectiveCost_ledger,
           sum(l) FILTER (side) AS ListCost, sum(l) FILTER (NOT side) AS ListCost_ledger,
           sum(x) FILTER (side) AS x_EstimatedCost, sum(x) FILTER (NOT side) AS x_EstimatedCost_ledger,
           sum(p) FILTER (side) AS x_PromotionalCost, sum(p) FILTER (NOT side) AS x_PromotionalCost_ledger
    FROM (SELECT true AS side, x_ChargeKey, x_Occurrence, x_HourUtc, x_MachineId, x_DeviceId, x_JobId, x_Attempt, x_Rank,
                 x_Category, BilledCost AS b, EffectiveCost AS e, ListCost AS l, x_EstimatedCost AS x, x_PromotionalCost AS p
          FROM w_addresses
          UNION ALL
          SELECT false, * REPLACE (BilledCost::HUGEINT AS BilledCost, EffectiveCost::HUGEINT AS EffectiveCost,
                                   ListCost::HUGEINT AS ListCost, x_EstimatedCost::HUGEINT AS x_EstimatedCost,
                                   x_PromotionalCost::HUGEINT AS x_PromotionalCost)
          FROM addresses_in)
    GROUP BY ALL
    HAVING count(*) FILTER (side) <> 1 OR count(*) FILTER (NOT side) <> 1
        OR sum(b) FILTER (side) IS DISTINCT FROM sum(b) FILTER (NOT side)
        OR sum(e) FILTER (side) IS DISTINCT FROM sum(e) FILTER (NOT side)
        OR sum(l) FILTER (side) IS DISTINCT FROM sum(l) FILTER (NOT side)
        OR sum(x) FILTER (side) IS DISTINCT FROM sum(x) FILTER (NOT side)
        OR sum(p) FILTER (side) IS DISTINCT FROM sum(p) FILTER (NOT side);

CREATE TEMP TABLE d_spans AS
    SELECT * EXCLUDE (side, n), count(*) FILTER (side) AS ours, count(*) FILTER (NOT side) AS theirs,
           sum(n) FILTER (side) AS x_Ns, sum(n) FILTER (NOT side) AS x_Ns_ledger
    FROM (SELECT true AS side, * RENAME (x_Ns AS n) FROM w_spans UNION ALL SELECT false, * FROM spans_in)
    GROUP BY ALL
    HAVING count(*) FILTER (side) <> 1 OR count(*) FILTER (NOT side) <> 1
        OR sum(n) FILTER (side) IS DISTINCT FROM sum(n) FILTER (NOT side);

CREATE TEMP TABLE d_layers AS
    SELECT * EXCLUDE (side, b, e, x, p), count(*) FILTER (side) AS ours, count(*) FILTER (NOT side) AS theirs,
           sum(b) FILTER (side) AS BilledCost, sum(b) FILTER (NOT side) AS BilledCost_ledger,
           sum(e) FILTER (side) AS EffectiveCost, sum(e) FILTER (NOT side) AS EffectiveCost_ledger,
           sum(x) FILTER (side) AS x_EstimatedCost, sum(x) FILTER (NOT side) AS x_EstimatedCost_ledger,
           sum(p) FILTER (side) AS x_PromotionalCost, sum(p) FILTER (NOT side) AS x_PromotionalCost_ledger
    FROM (SELECT true AS side, * RENAME (BilledCost AS b, EffectiveCost AS e, x_EstimatedCost AS x, x_PromotionalCost AS p)
          FROM w_layers
          UNION ALL
          SELECT false, * REPLACE (BilledCost::HUGEINT AS BilledCost, EffectiveCost::HUGEINT AS EffectiveCost,
                                   x_EstimatedCost::HUGEINT AS x_EstimatedCost, x_PromotionalCost::HUGEINT AS x_PromotionalCost)
          FROM layers_in)
    GROUP BY ALL
    HAVING count(*) FILTER (side) <> 1 OR count(*) FILTER (NOT side) <> 1
        OR sum(b) FILTER (side) IS DISTINCT FROM sum(b) FILTER (NOT side)
        OR sum(e) FILTER (side) IS DISTINCT FROM sum(e) FILTER (NOT side)
        OR sum(x) FILTER (side) IS DISTINCT FROM sum(x) FILTER (NOT side)
        OR sum(p) FILTER (side) IS DISTINCT FROM sum(p) FILTER (NOT side);

CREATE TEMP VIEW w_totals AS
    SELECT currency AS BillingCurrency, x_Category, sum(BilledCost) AS BilledCost, sum(EffectiveCost) AS EffectiveCost,
           sum(x_EstimatedCost) AS x_EstimatedCost
    FROM w_addresses GROUP BY ALL;
